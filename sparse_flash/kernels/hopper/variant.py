"""A variant in the form that the Hopper kernels take: dropout in arguments of its own, the rest as for the portable kernels."""

from typing import NamedTuple

from ..common.variant import NO_SWITCHES, NO_VARIANT, KernelVariant, kernel_variant


class HopperVariant(NamedTuple):
    """given: the kernel's argument, without dropout. switches: see ``common.variant``. kinds: what Triton specializes on. numbers:
    those that enter a launch by value. dropout_p: None without dropout."""

    given: KernelVariant = NO_VARIANT
    switches: dict = NO_SWITCHES
    kinds: tuple = ()
    numbers: tuple = ()
    dropout_p: float | None = None

    @property
    def key(self) -> tuple:
        """Everything but addresses that launches depend on."""
        return self.kinds, self.numbers, self.dropout_p, *self.switches.values()


PLAIN = HopperVariant()


def hopper_variant(variant) -> HopperVariant:
    if variant is None:
        return PLAIN
    given, switches, kinds = kernel_variant(variant)
    dropout_p = given.dropout_p
    if variant.seed is not None:
        given = given._replace(seed=None, dropout_p=None)
    return HopperVariant(given, switches, kinds, (given.softcap,), dropout_p)
