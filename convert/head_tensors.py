"""The tensors of a drafter's checkpoint: which there are, and how its exporter names them."""

import dataclasses
import re

from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.source import Source

_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.")


def is_drafter(source: Source) -> bool:
    """Whether the folder holds a drafter and not a target."""
    names = ("fc.weight", "mask_hidden", "model.fc.weight")
    return "speculators_model_type" in source.config or any(n in source.tensors for n in names)


@dataclasses.dataclass(frozen=True)
class HeadTensors:
    """How the source spells the names that vary, and the shapes that the config follows.

    Attributes:
      root: "model." where the exporter kept the wrapper's name (AutoModel), else empty.
      first: name of the first block, after the root.
      shapes: by name.
    """

    root: str
    first: str
    shapes: dict[str, tuple[int, ...]]

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Returns the shape of a tensor that every such head has.

        Raises:
          ConvertError: it is missing or has another number of axes.
        """
        if name not in self.shapes:
            raise ConvertError(f"{name} is missing: this is no P-EAGLE or EAGLE-3 head")
        if len(self.shapes[name]) != axes:
            raise ConvertError(f"{name} is {self.shapes[name]}, expected {axes} axes")
        return self.shapes[name]

    @property
    def fc(self) -> str:
        """The projection of the features."""
        return f"{self.root}fc.weight"

    @property
    def embedding(self) -> str:
        """The drafter's own embedding table."""
        return f"{self.root}embed_tokens.weight"

    @property
    def head(self) -> str:
        """The drafter's own head, which no exporter puts inside the wrapper."""
        return "lm_head.weight"

    def in_first(self, name: str) -> str:
        """Returns the full name of a tensor of the first block."""
        return f"{self.root}{self.first}.{name}"

    @property
    def parallel(self) -> bool:
        """Whether it has the shared hidden state of P-EAGLE."""
        return "mask_hidden" in self.shapes

    @property
    def layers(self) -> int:
        """Number of blocks that the tensors make."""
        found = (_LAYER.match(name.removeprefix(self.root)) for name in self.shapes)
        return 1 + max((int(m[1] or 0) for m in found if m), default=-1)


def head_tensors(source: Source) -> HeadTensors:
    """Returns the names and shapes of a drafter's folder."""
    root = "model." if "model.fc.weight" in source.tensors else ""
    midlayer = any(name.startswith(f"{root}midlayer.") for name in source.tensors)
    first = "midlayer" if midlayer else "layers.0"
    return HeadTensors(root, first, {name: t.shape for name, t in source.tensors.items()})
