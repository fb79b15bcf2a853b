"""Rotary embeddings in configs: `rope_theta` and `rope_scaling` (4.x), `rope_parameters` (5.x)."""

import math
from typing import Any

from peagle_jax.config import RopeConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.keys import Keys

_KINDS = ("default", "linear", "llama3", "yarn")
_ORIGINAL = "original_max_position_embeddings"


def read_rope(keys: Keys, max_position_embeddings: int) -> RopeConfig:
    """Takes the keys of the rotary embedding in either spelling.

    Args:
      keys: the config.
      max_position_embeddings: the config's, which transformers takes for the original context
        where a yarn config does not give that.

    Raises:
      ConvertError: the base is missing, the kind is not supported, or the spellings disagree.
      ConfigError: the values make no rotary embedding.
    """
    thetas = {keys.number("rope_theta")} if (top := keys.peek("rope_theta")) is not None else set()
    original = keys.integer_or_none(_ORIGINAL)
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        if keys.peek(name) is None:
            keys.ignore([name])
            continue
        nested = keys.nested(name)
        if nested.peek("rope_theta") is not None:
            thetas.add(nested.number("rope_theta"))
        nested.ignore(["rope_theta"])
        found.append(_read_scaling(nested, original, max_position_embeddings))
    if not thetas:
        raise ConvertError(
            f"{keys.where}: rope_theta is missing (at the top, or in rope_parameters); there is no "
            "default, because a wrong base still loads: add the one that the model was trained with"
        )
    if len(thetas) > 1 or any(scaling != found[0] for scaling in found):
        raise ConvertError(
            f"{keys.where}: rope_theta {top}, rope_scaling and rope_parameters disagree"
        )
    if original is not None and not any(_ORIGINAL in scaling for scaling in found):
        raise keys.error(_ORIGINAL, original, "absent without llama3 or yarn rope")
    return RopeConfig(theta=thetas.pop(), **(found[0] if found else {}))


def yarn_attention_factor(factor: float) -> float:
    """Returns what YaRN multiplies cosines and sines by where the config does not say it."""
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_scaling(keys: Keys, original: int | None, max_position: int) -> dict[str, Any]:
    """Returns the fields of `RopeConfig` but `theta` from a scaling object.

    Args:
      keys: the object.
      original: the original context, where the config gives it outside of the object.
      max_position: the config's max_position_embeddings.
    """
    kinds = [kind for name in ("rope_type", "type") if (kind := keys.take(name)) is not None]
    kind = kinds[0] if kinds else "default"
    if kind not in _KINDS or any(other != kind for other in kinds):
        shown = " and ".join(map(str, kinds))
        raise keys.error("rope_type", shown, f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    keys.only("partial_rotary_factor", 1.0, 1)
    scaling: dict[str, Any] = {}
    if kind != "default":
        scaling = {"kind": kind, "factor": keys.number("factor")}
    if kind in ("llama3", "yarn"):
        inner = keys.integer_or_none(_ORIGINAL)
        if None not in (inner, original) and inner != original:
            raise ConvertError(f"{keys.where}: {_ORIGINAL} is {inner}, but {original} at the top")
        # For llama3 the context that the model was made for would make no sense.
        default = max_position if kind == "yarn" else None
        given = original if inner is None else inner
        scaling[_ORIGINAL] = default if given is None else given
        if scaling[_ORIGINAL] is None:
            raise ConvertError(f"{keys.where}: {_ORIGINAL} is missing")
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            scaling[name] = keys.number(name)
    if kind == "yarn":
        scaling |= _read_yarn(keys, scaling["factor"])
    keys.done()
    return scaling


def _read_yarn(keys: Keys, factor: float) -> dict[str, Any]:
    """Returns the fields of `RopeConfig` that only yarn has, with transformers' defaults."""
    scales = [keys.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if all(scales):
        default = _magnitude(factor, scales[0]) / _magnitude(factor, scales[1])
    else:  # transformers goes by both or by neither
        default = yarn_attention_factor(factor)
    return {
        "beta_fast": keys.number("beta_fast", 32.0),
        "beta_slow": keys.number("beta_slow", 1.0),
        "truncate": keys.flag("truncate", True),
        "attention_factor": keys.number("attention_factor", default),
    }
