"""What layer ids count: known from the format or the ids themselves, else asked for."""

from pathlib import Path
from typing import Any

import pytest
from convert_sources import (
    PEAGLE,
    SPECULATORS,
    Config,
    drafter_tensors,
    parse_drafter,
    without,
)
from format_sources import SPECFORGE

from peagle_jax.config import DrafterConfig
from peagle_jax.convert import ConvertError

AUX = "eagle_aux_hidden_state_layer_ids"
BOUNDARY = "given as boundaries (the input of layer id: vLLM, speculators)"
LAYER_OUTPUT = "given as layer outputs (boundary id + 1: SpecForge, AutoModel)"
BOTH = ("boundary", "layer_output")


def parse(folder: Path, kind: str, ids: list[int], *given: Any) -> DrafterConfig:
    """Returns the config of a head of a format that lists these ids."""
    first, mask = "layers.0", None
    if kind == "speculators":
        config: Config = SPECULATORS | {AUX: ids}
    elif kind == "SpecForge":
        config, mask = SPECFORGE | {"eagle_config": {AUX: ids}}, 39
    else:
        config, first = PEAGLE | {AUX: ids}, "midlayer"
    tensors = drafter_tensors(first=first, boundaries=len(ids))
    layers, convention = (*given, None, None)[:2]
    return parse_drafter(folder, config, tensors, layers, convention, mask)


@pytest.mark.parametrize(
    ("kind", "ids", "layers", "boundaries"),
    [
        ("speculators", [1, 3, 4], 8, (1, 3, 4)),
        ("speculators", [1, 17, 32], None, (1, 17, 32)),
        ("vLLM", [2, 18, 33], 36, (2, 18, 33)),
        ("vLLM", [2, 5, 30], 36, (2, 5, 30)),
        ("vLLM", [2, 5, 30], None, (2, 5, 30)),
        ("vLLM", [24, 30, 36], 36, (24, 30, 36)),  # no layer has the output 36
        ("vLLM", [1, 17, 36], 36, (1, 17, 36)),
        ("SpecForge", [2, 18, 33], 36, (2, 18, 33)),
    ],
)
def test_ids_that_can_only_be_boundaries(
    kind: str, ids: list[int], layers: int | None, boundaries: tuple[int, ...], tmp_path: Path
) -> None:
    parsed = parse(tmp_path, kind, ids, layers)
    assert (parsed.aux_boundaries, parsed.aux_source_convention) == (boundaries, BOUNDARY)


@pytest.mark.parametrize(
    ("kind", "ids", "layers", "boundaries"),
    [
        ("vLLM", [1, 17, 32], 36, (2, 18, 33)),  # the default, one less
        ("SpecForge", [1, 17, 32], None, (2, 18, 33)),
        ("SpecForge", [1, 11, 21], 24, (2, 12, 22)),
    ],
)
def test_ids_that_can_only_be_layer_outputs(
    kind: str, ids: list[int], layers: int | None, boundaries: tuple[int, ...], tmp_path: Path
) -> None:
    parsed = parse(tmp_path, kind, ids, layers)
    assert (parsed.aux_boundaries, parsed.aux_source_convention) == (boundaries, LAYER_OUTPUT)


@pytest.mark.parametrize(
    ("kind", "ids", "layers"),
    [
        ("vLLM", [1, 17, 32], None),
        ("vLLM", [1, 17, 32], 48),
        ("vLLM", [1, 11, 21], 24),  # SpecForge's GPT-OSS EAGLE-3 heads, or vLLM's boundaries
        ("vLLM", [0, 4, 7], None),
        ("vLLM", [24, 30, 36], None),
        ("vLLM", [12], 36),
        ("SpecForge", [2, 18, 33], None),
        ("SpecForge", [0, 4, 7], 36),
    ],
)
def test_ambiguous_ids_are_asked_for(
    kind: str, ids: list[int], layers: int | None, tmp_path: Path
) -> None:
    with pytest.raises(
        ConvertError,
        match=r"config\.json: .*layer_ids is \[.*--aux-convention boundary\|layer_output",
    ):
        parse(tmp_path, kind, ids, layers)
    plus_one = tuple(i + 1 for i in ids)
    assert parse(tmp_path, kind, ids, layers, "boundary").aux_boundaries == tuple(ids)
    assert parse(tmp_path, kind, ids, layers, "layer_output").aux_boundaries == plus_one


def test_the_user_decides_where_the_format_does_not(tmp_path: Path) -> None:
    parsed = parse(tmp_path, "vLLM", [2, 18, 33], 36, "layer_output")
    assert (parsed.aux_boundaries, parsed.aux_source_convention) == ((3, 19, 34), LAYER_OUTPUT)
    parsed = parse(tmp_path, "SpecForge", [1, 17, 32], None, "boundary")
    assert (parsed.aux_boundaries, parsed.aux_source_convention) == ((1, 17, 32), BOUNDARY)
    assert parse(tmp_path, "speculators", [1, 3, 4], 8, "boundary").aux_boundaries == (1, 3, 4)
    with pytest.raises(ConvertError, match=r"boundaries in every speculators.*is layer_output"):
        parse(tmp_path, "speculators", [1, 3, 4], 8, "layer_output")


def test_boundary_l_is_included_and_none_is_beyond(tmp_path: Path) -> None:
    assert parse(tmp_path, "vLLM", [0, 36], 36, "boundary").aux_boundaries == (0, 36)
    assert parse(tmp_path, "vLLM", [0, 35], 36, "layer_output").aux_boundaries == (1, 36)
    with pytest.raises(ConvertError, match=r"\[2, 37\], supported is distinct layer ids 0\.\.36"):
        parse(tmp_path, "vLLM", [2, 37], 36, "boundary")
    with pytest.raises(ConvertError, match=r"\[2, 36\], supported is layer outputs 0\.\.35"):
        parse(tmp_path, "vLLM", [2, 36], 36, "layer_output")
    with pytest.raises(ConvertError, match=r"\[2, 4, 5\], supported is distinct layer ids 0\.\.4"):
        parse(tmp_path, "speculators", [2, 4, 5], 4)


@pytest.mark.parametrize("convention", BOTH)
def test_a_convention_without_ids_is_an_error(convention: Any, tmp_path: Path) -> None:
    config = without(PEAGLE, AUX)
    with pytest.raises(ConvertError, match=f"nothing that --aux-convention {convention} could"):
        parse_drafter(tmp_path, config, drafter_tensors(), 24, convention)


def test_an_unknown_convention_is_an_error(tmp_path: Path) -> None:
    unknown: Any = "sglang"
    with pytest.raises(ConvertError, match="'sglang', not boundary or layer_output"):
        parse_drafter(tmp_path, PEAGLE, drafter_tensors(), aux_convention=unknown)


def test_ids_at_the_top_and_in_eagle_config_must_agree(tmp_path: Path) -> None:
    both = PEAGLE | {"eagle_config": {AUX: [2, 4, 5]}}
    assert parse_drafter(tmp_path, both, drafter_tensors()).aux_boundaries == (2, 4, 5)
    with pytest.raises(ConvertError, match=r"and, in eagle_config, \[1, 3, 4\]"):
        other = PEAGLE | {"eagle_config": {AUX: [1, 3, 4]}}
        parse_drafter(tmp_path, other, drafter_tensors())
