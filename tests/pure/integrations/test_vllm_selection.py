"""Which of tilegen's back ends vLLM gives a layer by the one name CUSTOM, and what it does not give
it: by its recorded interface, and by the package itself where it is installed."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_latents import FORMS, latent_classes, needs_vllm
from tests.support.engine_stand_ins import forget


@pytest.fixture(params=FORMS)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our classes, and those of vLLM's that a batch is made of."""
    return latent_classes(request.param, monkeypatch)


@pytest.mark.parametrize(
    "model, expected",
    [(True, "TilegenLatentBackend"), (False, "TilegenBackend"), (None, "TilegenBackend")],
)
def test_the_name_resolves_to_the_models_backend(
    vllm: Any, model: bool | None, expected: str
) -> None:
    from tilegen.integrations import vllm as entry

    entry.register()
    path = entry.AttentionBackendEnum.CUSTOM.get_path()
    assert path == entry.BACKEND
    module, _, name = path.rpartition(".")
    given = None if model is None else SimpleNamespace(use_mla=model)
    with vllm.set_current_vllm_config(SimpleNamespace(model_config=given)):
        actual = getattr(sys.modules[module], name)
    assert actual.__name__ == expected
    with pytest.raises(AttributeError, match="no attribute 'another'"):
        entry.another  # noqa: B018


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's platform of a Hopper GPU, without the libraries of one."""
    forget(monkeypatch, "vllm")
    monkeypatch.setitem(
        sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch")
    )
    was = torch.backends.cuda.cudnn_sdp_enabled()
    from vllm.platforms import cuda, interface  # pyright: ignore

    torch.backends.cuda.enable_cudnn_sdp(was)
    capability = classmethod(lambda cls, device_id=0: interface.DeviceCapability(9, 0))
    return type("Hopper", (cuda.CudaPlatformBase,), {"get_device_capability": capability})


@needs_vllm
def test_vllm_selects_each_by_the_one_name(platform: Any) -> None:
    from vllm.config import set_current_vllm_config  # pyright: ignore
    from vllm.utils.import_utils import resolve_obj_by_qualname  # pyright: ignore
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # pyright: ignore
    from vllm.v1.attention.selector import AttentionSelectorConfig  # pyright: ignore

    from tilegen.integrations.vllm import register

    register()
    custom = AttentionBackendEnum.CUSTOM
    assert pickle.loads(pickle.dumps(custom)) is custom, "the name reaches vLLM's processes"

    def select(*, model: bool, layer: bool) -> str:
        asked = AttentionSelectorConfig(
            576 if layer else 128, torch.bfloat16, "auto", None, use_mla=layer
        )
        with set_current_vllm_config(SimpleNamespace(model_config=SimpleNamespace(use_mla=model))):
            path = platform.get_attn_backend_cls(custom, asked)
        assert resolve_obj_by_qualname(path).__name__ == path.rpartition(".")[2]
        return path

    ours = "tilegen.integrations"
    assert select(model=True, layer=True) == f"{ours}.vllm_latent.TilegenLatentBackend"
    assert select(model=False, layer=False) == f"{ours}.vllm_backend.TilegenBackend"
    # As a draft model without MLA for one with it.
    with pytest.raises(ValueError, match="non-MLA not supported"):
        select(model=True, layer=False)
    with pytest.raises(ValueError, match="MLA not supported"):
        select(model=False, layer=True)


@needs_vllm
def test_vllm_selects_the_one_for_prompts(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms  # pyright: ignore
    from vllm.config.attention import AttentionConfig  # pyright: ignore
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend  # pyright: ignore

    from tilegen.integrations.vllm import register
    from tilegen.integrations.vllm_latent import TilegenPrefillBackend

    register()
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform())
    text = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, hf_text_config=text),
        attention_config=AttentionConfig(mla_prefill_backend="CUSTOM"),
    )
    assert get_mla_prefill_backend(config) is TilegenPrefillBackend
    custom = config.attention_config.mla_prefill_backend
    assert pickle.loads(pickle.dumps(custom)) is custom, "the name reaches vLLM's processes"


@needs_vllm
def test_the_installed_package_lists_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "vllm")
    from tilegen.integrations.vllm_latent import TilegenLatentBackend

    common: dict[str, Any] = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
    }
    judge: Any = TilegenLatentBackend.validate_configuration
    most = {"use_non_causal": True, "use_batch_invariant": True, "use_kv_connector": True}
    assert judge(**common, **most) == []
    refused = {
        "kv_cache_dtype": ["fp8", "fp8_e4m3", "fp8_ds_mla", "float16"],
        "use_mla": [False],
        "has_sink": [True],
        "use_sparse": [True],
        "use_mm_prefix": [True],
        "attn_type": ["encoder"],
        "head_size": [128, 448],
        "block_size": [24],
        "dtype": [torch.float32],
        "device_capability": [SimpleNamespace(major=7, minor=5)],
    }
    for name, values in refused.items():
        for value in values:
            assert judge(**common | {name: value}), name
    assert judge(**common | {"dtype": torch.float32, "head_size": 512}) == ["dtype not supported"]
    for name in (
        *("use_rswa", "use_pcp", "use_dcp", "use_adaptive_verification", "has_sliding_window"),
    ):
        assert len(judge(**common, **{name: True})) == 1, name


@needs_vllm
def test_prompts_of_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "vllm")
    from vllm.v1.attention.backends.mla.prefill.selector import (  # pyright: ignore
        MLAPrefillSelectorConfig,
    )

    from tilegen.integrations.vllm_latent import TilegenPrefillBackend

    judge, asked = TilegenPrefillBackend.validate_configuration, MLAPrefillSelectorConfig
    hopper = SimpleNamespace(major=9, minor=0)
    assert judge(hopper, asked(torch.bfloat16)) == []
    assert len(judge(SimpleNamespace(major=7, minor=5), asked(torch.bfloat16))) == 1
    assert len(judge(None, asked(torch.bfloat16))) == 1
    assert len(judge(hopper, asked(torch.float8_e4m3fn))) == 1
