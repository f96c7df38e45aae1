"""The base model as adapters see it: the linear layers that they may change, and their sizes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MODULE_PATHS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Modules that adapters may target, in table order: index 0 is q_proj."""


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """One linear layer of every decoder layer."""

    path: str
    """Path below the layer, as PEFT names it: `self_attn.q_proj`."""
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        """The last part of the path: `q_proj`."""
        return self.path.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A fused base linear layer; its slices are the modules that share its input."""

    name: str
    """qkv, o, gate_up or down."""
    modules: tuple[int, ...]
    """Indices into `BaseShape.modules`, in slice order."""


SITES = (
    SiteShape("qkv", (0, 1, 2)),
    SiteShape("o", (3,)),
    SiteShape("gate_up", (4, 5)),
    SiteShape("down", (6,)),
)
"""Sites in the order in which a layer computes them; a site's index is its place here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """The linear layers of a base model."""

    digest: str
    """`sha256:<64 hex>` of the base: config and the sizes and digests of its weight files."""
    num_layers: int
    modules: tuple[ModuleShape, ...]
    """Modules in the order of `MODULE_PATHS`."""
    layer_prefix: str = "model.layers"
    """Path of the layers in the Hugging Face module tree."""
    folds_input_scale: bool = False
    """True if the checkpoint's linears get scaled inputs (AWQ, SmoothQuant), so that adapters of the original model do
    not fit it."""

    @property
    def largest_row_features(self) -> int:
        """Elements of the widest LoRA row."""
        return max(max(module.in_features, module.out_features) for module in self.modules)

    def site_widths(self, site_index: int) -> tuple[int, ...]:
        """Output features of each slice of a site, in slice order."""
        return tuple(self.modules[m].out_features for m in SITES[site_index].modules)
