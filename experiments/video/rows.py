"""The models that are trained, and the rows that are compared."""

from dataclasses import dataclass

from .masks import BY_SHARE, SHARES, VSA

FIRST = 0.2  # the part of the steps that is dense in rows that begin dense
TRAINED = SHARES[0]  # of sparse training


def mask_name(mask: str, share: float) -> str:
    return f"{mask} {share:g}" if mask in BY_SHARE else mask


@dataclass(frozen=True)
class Arm:
    """A training. mask, share: as masks_of takes them. seed: of the first weights, the scenes and the noise. tuned: whether it
    begins with the weights of the dense model of seed 0."""

    mask: str
    share: float = TRAINED
    seed: int = 0
    tuned: bool = False

    @property
    def name(self) -> str:
        """Its file is this with .pt."""
        return "-".join([*mask_name(self.mask, self.share).split(), "tuned" if self.tuned else str(self.seed)])


DENSE = Arm("dense")


@dataclass(frozen=True)
class Row:
    """A way of sampling. arm: whose weights; None for videos that stand still. first: the part of the steps that is dense, at the
    start."""

    arm: Arm | None
    mask: str = "dense"
    share: float = TRAINED
    first: float = 0.0

    @property
    def name(self) -> str:
        if self.arm is None:
            return "still"
        parts = [mask_name(self.mask, self.share)]
        parts += [f"seed {self.arm.seed}"] * bool(self.arm.seed) + ["tuned"] * self.arm.tuned
        parts += ["trained"] * (self.arm.mask != "dense" and not self.arm.tuned)
        parts += [f"first {self.first:.0%} dense"] * bool(self.first)
        return ", ".join(parts)


def rows() -> dict[str, Row]:
    """All rows by name. Sparse sampling with the dense model's weights comes first, then with weights that were trained sparse."""
    made = [Row(DENSE), Row(Arm("dense", seed=1)), Row(Arm("dense", tuned=True)), Row(None)]
    made += [Row(DENSE, mask, share) for mask in ("window", "sampled", "pooled", "random") for share in SHARES]
    made += [Row(DENSE, "frames"), Row(DENSE, "radial")]
    made += [Row(DENSE, mask, share, FIRST) for mask in ("window", "sampled", "random") for share in SHARES[:2]]
    for tuned in (True, False):
        made += [Row(Arm(mask, tuned=tuned), mask) for mask in ("window", "sampled", "random", VSA)]
    return {row.name: row for row in made}
