"""All configs of a kernel at once: an array for each knob, with a number for each config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilegen.kernels.config import OPTIONS, TileConfig
from tilegen.task import KernelTask, Tiled

P = ParamSpec("P")
R = TypeVar("R")

Number = Any
"""A number, or an array with a number for each config. Counts are exact: Python integers, or
fractions where the means of heads are none."""


class Columns:
    """Configs with an array for each knob of `TileConfig`, by the name of the knob."""

    def __init__(self, knobs: Mapping[str, NDArray[Any]]) -> None:
        self._knobs = dict(knobs)

    @classmethod
    def of(cls, configs: Sequence[TileConfig]) -> Columns:
        """Return configs as columns."""
        return cls({name: np.array([getattr(one, name) for one in configs]) for name in OPTIONS})

    @classmethod
    def joined(cls, parts: Iterable[Columns]) -> Columns:
        """Return the configs of all parts, one part after the other."""
        every = [part._knobs for part in parts]
        return cls({name: np.concatenate([knobs[name] for knobs in every]) for name in OPTIONS})

    @classmethod
    def product(cls, **values: Sequence[int]) -> Columns:
        """Return a config for each combination of values, the last knob fastest. Other knobs have
        their defaults."""
        every = {one.name: [values.get(one.name, [one.default])] for one in fields(TileConfig)}
        names = [*values, *(every.keys() - values.keys())]
        grids = np.meshgrid(*(every[name][0] for name in names), indexing="ij")
        return cls(dict(zip(names, (grid.ravel() for grid in grids), strict=True)))

    def having(self, **knobs: Any) -> Columns:
        """Return the configs with other values of some knobs."""
        same = {name: np.full(len(self), value) for name, value in knobs.items()}
        return Columns(self._knobs | same)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._knobs[name]

    def __len__(self) -> int:
        return len(self._knobs["block_m"])

    def __getitem__(self, index: Any) -> Columns:
        return Columns({name: column[index] for name, column in self._knobs.items()})

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of a tile of scores: see `TileConfig.rows`."""
        return self.block_m * self.heads

    def config(self, at: int) -> TileConfig:
        """Return one of the configs."""
        return TileConfig(**{name: column[at].item() for name, column in self._knobs.items()})

    @property
    def configs(self) -> list[TileConfig]:
        """All configs."""
        return [self.config(at) for at in range(len(self))]

    @cached_property
    def tiles(self) -> tuple[Columns, NDArray[np.int64]]:
        """One config for each tile, and the tile of each config. Configs of a tile differ in knobs
        on which traffic does not depend."""
        code = np.zeros(len(self), dtype=np.int64)
        for name, option in OPTIONS.items():
            if option.is_tile:
                code = code * (max(option.allowed) + 1) + self._knobs[name]
        _, first, tile = np.unique(code, return_index=True, return_inverse=True)
        return (self, tile) if len(first) == len(self) else (self[first], tile)


@dataclass(frozen=True, eq=False)
class Tiles(Tiled):
    """A task with several configs: `config` has arrays."""

    config: Any
    """The `Columns` of the configs."""

    def __getitem__(self, index: Any) -> Tiles:
        return Tiles(self.task, self.config[index])

    @cached_property
    def of_tiles(self) -> tuple[Tiles, Any]:
        """The task with one config for each tile, and the place of the tile of each config."""
        columns, tile = self.config.tiles
        return (self, ...) if columns is self.config else (Tiles(self.task, columns), tile)

    @cached_property
    def counted(self) -> dict[Any, Any]:
        """Results of functions of tiles: several formulas of an evaluation use the same counts."""
        return {}


def tiles_of(task: KernelTask, configs: Sequence[TileConfig]) -> Tiles:
    """Combine a task with several configs."""
    return Tiles(task, Columns.of(configs))


def picked(record: Any, index: Any) -> Any:
    """Return a record of arrays at an index: with numbers for a single index, else with arrays."""
    if isinstance(record, np.ndarray):
        record = record[index]
        record = record[()] if isinstance(record, np.ndarray) and not record.ndim else record
    if isinstance(record, np.generic):
        return record.item()
    if isinstance(record, dict):
        return {name: picked(value, index) for name, value in record.items()}  # type: ignore
    if is_dataclass(record) and not isinstance(record, type):
        values = {one.name: picked(getattr(record, one.name), index) for one in fields(record)}
        return type(record)(**values)
    return record


def in_columns(
    compute: Callable[Concatenate[Tiled, P], R],
) -> Callable[Concatenate[Tiled, P], R]:
    """Decorate a function that computes arrays for `Tiles`: for a single config, it returns
    numbers."""

    @wraps(compute)
    def for_any(tiled: Tiled, *args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(tiled, Tiles):
            return compute(tiled, *args, **kwargs)
        return picked(compute(tiles_of(tiled.task, [tiled.config]), *args, **kwargs), 0)

    return for_any


def by_tile(compute: Callable[Concatenate[Tiled, P], R]) -> Callable[Concatenate[Tiled, P], R]:
    """Decorate a function as `in_columns` does. It is computed once for each tile."""

    @in_columns
    @wraps(compute)
    def for_tiles(tiled: Tiled, *args: P.args, **kwargs: P.kwargs) -> R:
        assert isinstance(tiled, Tiles)
        (tiles, tile), key = tiled.of_tiles, (compute, args, *kwargs.items())
        if key not in tiles.counted:
            tiles.counted[key] = compute(tiles, *args, **kwargs)
        counts = tiles.counted[key]
        return counts if tile is ... else picked(counts, tile)

    return for_tiles


def exact(numbers: Any) -> NDArray[np.object_]:
    """Return an array of Python integers and fractions, whose arithmetic is exact."""
    return np.array(numbers, dtype=object)


def floats(numbers: Any) -> Any:
    """Return exact numbers as floats."""
    return np.asarray(numbers).astype(np.float64)
