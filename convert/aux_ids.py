"""At which boundaries of the target a head reads it, whatever its source calls them.

A list of layer ids counts boundaries ("the input of layer id") or layer outputs (boundary id + 1);
neither its key nor its values always say which, and a wrong guess costs acceptance without a sign.
"""

from typing import Literal, get_args

from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.head_formats import AUX_KEY, Format
from peagle_jax.convert.keys import Keys

AuxConvention = Literal["boundary", "layer_output"]

_SHOWN = {
    "boundary": "given as boundaries (the input of layer id: vLLM, speculators)",
    "layer_output": "given as layer outputs (boundary id + 1: SpecForge, AutoModel)",
}


def default_boundaries(layers: int) -> tuple[int, int, int]:
    """Returns the boundaries that every trainer reads by default: low, middle and high."""
    return 2, layers // 2, layers - 3


def read_boundaries(
    keys: Keys, written_by: Format, layers: int | None, convention: AuxConvention | None
) -> tuple[tuple[int, ...], str]:
    """Takes the layer ids.

    Args:
      keys: the head's config.
      written_by: its format.
      layers: decoder blocks of the target, where known.
      convention: what the user says that the ids count, where he does.

    Returns:
      the boundaries, and how the source numbers them.

    Raises:
      ConvertError: they are no boundaries of such a target, it is not clear what they count, or
        there are none and the default is not known either.
    """
    if convention is not None and convention not in get_args(AuxConvention):
        raise ConvertError(f"--aux-convention is {convention!r}, not boundary or layer_output")
    ids = keys.integers(AUX_KEY)
    if ids is None:
        return _by_default(keys, layers, convention)
    last = "L" if layers is None else layers
    distinct = len(set(ids)) == len(ids) > 0
    if not distinct or min(ids) < 0 or (layers is not None and max(ids) > layers):
        raise keys.error(AUX_KEY, list(ids), f"distinct layer ids 0..{last}")
    convention = _convention(keys, ids, written_by, layers, convention)
    if convention == "boundary":
        return ids, _SHOWN[convention]
    boundaries = tuple(i + 1 for i in ids)
    if layers is not None and max(boundaries) > layers:
        raise keys.error(AUX_KEY, list(ids), f"layer outputs 0..{layers - 1}")
    return boundaries, _SHOWN[convention]


def _by_default(
    keys: Keys, layers: int | None, convention: AuxConvention | None
) -> tuple[tuple[int, ...], str]:
    if convention is not None:
        raise ConvertError(
            f"{keys.where}: {AUX_KEY} is missing: there is nothing that --aux-convention "
            f"{convention} could count; leave it out for the default boundaries"
        )
    if layers is None or layers < 6:
        raise ConvertError(
            f"{keys.where}: {AUX_KEY} is missing, and its default 2, L // 2, L - 3 needs a target "
            f"of L >= 6 layers, got {layers}: give the target's number of layers (--target-layers)"
        )
    return default_boundaries(layers), f"not given: default of a target of {layers} layers"


def _convention(
    keys: Keys,
    ids: tuple[int, ...],
    written_by: Format,
    layers: int | None,
    given: AuxConvention | None,
) -> AuxConvention:
    """Returns what the ids count, where the user, the format or the ids say so."""
    if written_by == "speculators":
        if given == "layer_output":
            raise ConvertError(
                f"{keys.where}: {AUX_KEY} counts boundaries in every speculators checkpoint, but "
                "--aux-convention is layer_output"
            )
        return "boundary"
    if given is not None:
        return given
    if layers is not None:
        if ids == default_boundaries(layers) or layers in ids:
            return "boundary"
        if ids == tuple(b - 1 for b in default_boundaries(layers)):
            return "layer_output"
    # SpecForge captures the output of layer id, and its defaults start at 1; SGLang, which serves
    # its heads, reads a list that starts otherwise as boundaries, as vLLM does every list.
    if ids[0] == 1 and written_by == "SpecForge":
        return "layer_output"
    if ids[0] == 2 and written_by != "SpecForge":
        return "boundary"
    raise ConvertError(
        f"{keys.where}: {AUX_KEY} is {list(ids)}, which may count boundaries (the input of layer "
        "id: vLLM, speculators) or layer outputs (SpecForge, AutoModel): say which with "
        "peagle-convert to-native --aux-convention boundary|layer_output"
    )
