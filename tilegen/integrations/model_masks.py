"""Read the mask functions of transformers' models as tilegen masks.

transformers describes a mask by nested functions of (batch_idx, head_idx, q_idx, kv_idx), made of a
dozen building blocks and rebuilt at each forward. The code of a function identifies the block, and
its closure holds the arguments. So nothing is traced, and a mask has the same form at each forward.
A block counts as known only if it agrees with its reader at a few positions, checked once at
import. transformers itself expands masks with unknown blocks to a bool tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from tilegen.errors import Unsupported
from tilegen.integrations import tables
from tilegen.integrations.windows import alignment_of
from tilegen.masks.mask import (
    Mask,
    causal,
    full,
    intersect,
    sliding_window,
    unite,
)
from tilegen.masks.values import UNKNOWN, Table, is_checked

MaskFunction = Callable[..., Any]


class NoTensor(Unsupported, AttributeError):
    """A model uses its mask as only a tensor can be used; `hasattr` sees it as False."""


@dataclass(frozen=True)
class ModelMask:
    """A mask on its way from transformers' mask interface to the layers of a model.

    Masks that `generate` makes ahead are passed to the mask interface again, which returns them
    unchanged, as it does tensors of four dimensions.
    """

    mask: Mask
    lengths: tuple[int, int]
    """The numbers of queries and of keys for which the mask was made."""
    batch: int
    is_padded: bool
    of_rows: Callable[..., ModelMask] = field(repr=False, compare=False)
    """Makes the mask of `q_length` queries from another first position, `q_offset`."""
    q_offset: Any = 0
    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that the mask would have as a tensor."""
        return (self.batch, 1, *self.lengths)

    def contiguous(self) -> ModelMask:
        """Return the mask itself: transformers calls this on masks that it makes ahead."""
        return self

    def __getitem__(self, index: Any) -> ModelMask:
        """Return the mask of some rows, `[:, :, first:end, :]`: in layers that share keys, Gemma 4
        computes only the last rows. Raises Unsupported for other parts."""
        match index:
            case (first, second, slice() as rows, last) if first == second == last == slice(
                None
            ) and rows.step in (None, 1):
                start, end, _ = rows.indices(self.lengths[0])
                if (start, end) == (0, self.lengths[0]):
                    return self
                return self.of_rows(q_length=end - start, q_offset=self.q_offset + start)
            case _:
                _refuse("looks at parts of it")

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f"asks for its {name}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        """Refuse to be an operand: models that add masks to scores compute attention themselves."""
        _refuse(f"gives it to {getattr(func, '__name__', func)}")


def _refuse(what: str) -> NoReturn:
    raise NoTensor(
        f"expected a model that hands its mask to its attention, got one that {what}; use "
        'attn_implementation="eager"'
    )


@dataclass(frozen=True)
class SequencePlace:
    """Place of a forward's queries and keys in the sequence that a model has seen."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    q_offset: Any
    """The position of the first query: a number, or a tensor if a cache has a fixed size."""
    kv_offset: Any
    device: Any

    @property
    def shift(self) -> Any:
        """The column at the position of the first query."""
        return self.q_offset - self.kv_offset

    @property
    def ends_together(self) -> bool:
        """True if the last query is known to have the position of the last key."""
        shift = self.shift
        return not isinstance(shift, torch.Tensor) and shift == self.seqlen_kv - self.seqlen_q

    def window(self, left: int | None, right: int | None) -> Mask:
        """Return the mask `q - left <= k <= q + right`, of positions."""
        if self.ends_together:
            alignment = alignment_of(self.seqlen_q, self.seqlen_kv)
            if left is None and right == 0:  # a single query sees all keys
                return full() if self.seqlen_q == 1 else causal(alignment)
            return sliding_window(left, right, alignment)
        return sliding_window(
            None if left is None else self._number(left - self.shift),
            None if right is None else self._number(right + self.shift),
        )

    def _number(self, value: Any) -> Table:
        """Return a number that a kernel reads, since it changes at each step of a generation."""
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=torch.int32, device=self.device)
        return Table(axes="", typical=UNKNOWN, tensor=value.reshape(()).to(torch.int32))


def model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | ModelMask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype | None = None,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> ModelMask:
    """Return the mask that transformers requests, once per forward and kind of layer."""
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    of_rows = partial(
        model_mask,
        batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        device=device,
    )
    place = SequencePlace(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    mask = read(mask_function, place)
    if mask is None:
        mask = tables.dense(
            masking_utils.sdpa_mask(
                *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function),
                allow_is_causal_skip=False,
                use_vmap=use_vmap,
                device=device,
            )  # type: ignore[arg-type]
        )
    if attention_mask is not None:
        known: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask = mask & tables.padding(known[:, kv_offset : kv_offset + kv_length], q_length)
    lengths, is_padded = (q_length, kv_length), attention_mask is not None
    return ModelMask(mask, lengths, batch_size, is_padded, of_rows, q_offset)


def read(function: MaskFunction, place: SequencePlace) -> Mask | None:
    """Return the mask that a function describes at a place; None if it is unknown.

    Under torch.compile closures cannot be read, so functions that have a closure are unknown.
    """
    if torch.compiler.is_compiling():
        for block, reader in _without_closure:
            if function is block:
                return reader(place)
        return None
    reader = _known.get(getattr(function, "__code__", None))
    return None if reader is None else reader(place, **_closure(function))


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


# --------------------------------------------------------------------------------------------------
# The building blocks. Parameters have the names of the variables in transformers' closures.

MaskReader = Callable[..., Mask | None]


def _causal(place: SequencePlace) -> Mask:
    return place.window(None, 0)


def _everything(place: SequencePlace) -> Mask:
    return full()


def _window(place: SequencePlace, sliding_window: int) -> Mask:
    return place.window(sliding_window - 1, None)


def _window_both_ways(place: SequencePlace, sliding_window: int) -> Mask:
    return place.window(sliding_window, sliding_window)


def _chunked(place: SequencePlace, chunk_size: int, left_padding: torch.Tensor) -> Mask:
    start = left_padding.to(place.device).view(-1, 1)
    at = place.q_offset - start, place.kv_offset - start
    return tables.chunks(chunk_size, (place.seqlen_q, place.seqlen_kv), at, place.shift)


def _blocks(place: SequencePlace, block_sequence_ids: torch.Tensor) -> Mask:
    """Return the mask `ids[q] == ids[k] >= 0`."""
    ids = block_sequence_ids.to(place.device).int().expand(place.batch, -1)
    of_q, of_k = (
        ids[:, torch.arange(length, device=ids.device) + offset]
        for length, offset in (
            (place.seqlen_q, place.q_offset),
            (place.seqlen_kv, place.kv_offset),
        )
    )
    return tables.groups(torch.where(of_q < 0, -1, of_q), torch.where(of_k < 0, -2, of_k))


def _all_of(place: SequencePlace, mask_functions: Sequence[MaskFunction]) -> Mask | None:
    if (packed := _packed(place, mask_functions)) is not None:
        return packed
    return _joined(intersect, place, mask_functions)


def _any_of(place: SequencePlace, mask_functions: Sequence[MaskFunction]) -> Mask | None:
    return _joined(unite, place, mask_functions)


def _joined(
    join: Callable[..., Mask], place: SequencePlace, functions: Sequence[MaskFunction]
) -> Mask | None:
    masks = [mask for function in functions if (mask := read(function, place)) is not None]
    return join(*masks) if len(masks) == len(functions) else None


def _packed(place: SequencePlace, functions: Sequence[MaskFunction]) -> Mask | None:
    """Return a mask within the documents of packed sequences: ids of the tokens' documents, and a
    mask between positions, which rise by one from token to token within a document."""
    if [getattr(function, "__code__", None) for function in functions] != _code_of_packed:
        return None
    ids = _closure(functions[0])["packed_sequence_mask"]
    inside, positions = (_closure(functions[1])[name] for name in ("mask_function", "position_ids"))
    if place.seqlen_q != place.seqlen_kv or not place.ends_together or not _fit(ids, positions):
        return None
    numbers = [ids]
    parts: list[Mask] = []
    for block in _flat(inside):
        code = getattr(block, "__code__", None)
        reader = _known.get(code)
        if reader in (_causal, _everything, _window, _window_both_ways):
            parts.append(reader(place, **_closure(block)))  # type: ignore
        elif reader is _chunked:
            made_with = _closure(block)
            from_start = positions - made_with["left_padding"].to(positions.device).view(-1, 1)
            numbers.append(torch.div(from_start, made_with["chunk_size"], rounding_mode="floor"))
        else:
            return None
    return intersect(tables.runs(*numbers), *parts)


def _flat(function: MaskFunction) -> list[MaskFunction]:
    """Return the functions whose conjunction a function is."""
    if _known.get(getattr(function, "__code__", None)) is not _all_of:
        return [function]
    return [part for block in _closure(function)["mask_functions"] for part in _flat(block)]


def _fit(ids: torch.Tensor, positions: torch.Tensor) -> bool:
    """Check whether positions rise by one within documents, if values may be read. transformers
    finds documents by the same rule."""
    if not is_checked(ids):
        return True
    same = ids[:, 1:] == ids[:, :-1]
    step = positions[:, 1:] - positions[:, :-1]
    return bool((ids[:, 1:] >= ids[:, :-1]).all()) and bool(((step == 1) | ~same).all())


# --------------------------------------------------------------------------------------------------
# Known building blocks of transformers


def known_blocks() -> dict[CodeType | None, MaskReader]:
    """Return the readers of building blocks, by code."""
    joins: dict[CodeType | None, MaskReader] = {
        masking_utils.and_masks(_yes).__code__: _all_of,
        masking_utils.or_masks(_yes).__code__: _any_of,
    }
    with torch.device("cpu"):  # whatever default device is set at import
        samples = ((block, reader) for block, reader in _samples() if _agrees(block, reader))
        return joins | {block.__code__: reader for block, reader in samples}


def _samples() -> list[tuple[Any, MaskReader]]:
    """Return an instance of each building block, with its reader."""
    some = torch.tensor([0, 2])
    ids = torch.tensor([[0, 0, -1, 1, 1, -1, 0], [-1, -1, 2, 2, 2, 1, 0]])
    return [
        (masking_utils.causal_mask_function, _causal),
        (masking_utils.bidirectional_mask_function, _everything),
        (masking_utils.sliding_window_overlay(3), _window),
        (masking_utils.sliding_window_bidirectional_overlay(2), _window_both_ways),
        (masking_utils.chunked_overlay(3, some), _chunked),
        (masking_utils.blockwise_overlay(ids), _blocks),
    ]


def _agrees(function: Any, reader: MaskReader) -> bool:
    """Check whether a building block agrees with its reader at a few positions."""
    b, h, q, k = (
        torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate((2, 1, 4, 7))
    )
    try:
        expected = function(b, h, q + 3, k)
        mask = reader(SequencePlace(2, 4, 7, 3, 0, "cpu"), **_closure(function))
        actual = mask.kept(q, k, 4, 7, b, h)  # type: ignore[union-attr]
        return torch.equal(expected.expand(2, 1, 4, 7), actual.expand(2, 1, 4, 7))
    except Exception:  # another version of transformers, with other building blocks
        return False


def code_of_packed() -> list[Any]:
    """Return the code of the two functions that transformers joins for packed sequences."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    joined = masking_utils.packed_sequence_compatibility_function(_yes, ids, ids)
    return [function.__code__ for function in _closure(joined)["mask_functions"]]


def _yes(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= 0


_known: dict[CodeType | None, MaskReader] = {}
_known |= known_blocks()
_without_closure = [
    pair for pair in _samples() if _known.get(pair[0].__code__) in (_causal, _everything)
]
_code_of_packed = code_of_packed()
