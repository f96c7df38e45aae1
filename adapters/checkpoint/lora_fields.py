"""Ranks and scalings of a config, and the `LoraSpec` that they make with the modules of a file.

Ranks in the file decide. The config has no effect on modules that the file does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from manylora.adapters.checkpoint.module_patterns import ModulePatterns
from manylora.adapters.ref import LoraSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFields:
    """Fields of `adapter_config.json` that change the result, as the file has them."""

    rank: int | None
    """`r`; None if the config has none."""
    alpha: float
    """`lora_alpha`."""
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_keys: ModulePatterns = field(default_factory=lambda: ModulePatterns({}), compare=False)
    """The keys of `rank_pattern`."""
    alpha_keys: ModulePatterns = field(default_factory=lambda: ModulePatterns({}), compare=False)
    """The keys of `alpha_pattern`."""
    scale: float | None = None
    """Factor of `B @ A` that does not depend on the rank, as in MLX; None if alpha gives it."""

    def rank_of(self, path: str) -> tuple[int | None, str]:
        """Rank of a module by its path, and the field that gives it."""
        key = self.rank_keys.first(path)
        return (self.rank, "r") if key is None else (self.rank_pattern[key], f"rank_pattern[{key}]")

    def alpha_of(self, path: str, rank: int) -> float:
        """Alpha of a module of this rank."""
        if self.scale is not None:
            return self.scale * rank
        key = self.alpha_keys.first(path)
        return self.alpha if key is None else self.alpha_pattern[key]

    def spec(self, ranks: Mapping[str, int]) -> LoraSpec:
        """Make the spec that is stored. Patterns stay as written, or name whole paths where they would need a regex.

        Args:
            ranks: Rank by path of each module in the file, for modules without a rank in the config.
        """
        default = Counter(ranks.values()).most_common(1)[0][0] if self.rank is None else self.rank
        alpha = self.alpha if self.scale is None else self.scale * default
        rank_pattern = dict(self.rank_pattern)
        alpha_pattern = dict(self.alpha_pattern)
        if self.rank is None or not self.rank_keys.are_literal:
            of_config = {path: self.rank_of(path)[0] for path in ranks}
            all_ranks = {
                path: own if own is not None else ranks[path] for path, own in of_config.items()
            }
            rank_pattern = {path: rank for path, rank in all_ranks.items() if rank != default}
        if self.scale is not None or not self.alpha_keys.are_literal:
            alphas = {path: self.alpha_of(path, rank) for path, rank in ranks.items()}
            alpha_pattern = {path: own for path, own in alphas.items() if own != alpha}
        return LoraSpec(
            rank=default,
            alpha=float(alpha),
            use_rslora=self.use_rslora,
            rank_pattern=rank_pattern,
            alpha_pattern={key: float(own) for key, own in alpha_pattern.items()},
        )
