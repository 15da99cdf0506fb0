"""A variant in the form that the Hopper kernels take."""

from typing import NamedTuple

from ..common.variant import NO_SWITCHES, NO_VARIANT, KernelVariant, kernel_variant


class HopperVariant(NamedTuple):
    """given: the kernel's argument. switches: see ``common.variant``. kinds: what Triton specializes on."""

    given: KernelVariant = NO_VARIANT
    switches: dict = NO_SWITCHES
    kinds: tuple = ()

    @property
    def dropout_p(self) -> float | None:
        return self.given.dropout_p


PLAIN = HopperVariant()


def hopper_variant(variant) -> HopperVariant:
    return PLAIN if variant is None else HopperVariant(*kernel_variant(variant))
