"""Experts on several devices: who holds them, how rows travel, how load is balanced."""

from moestro.parallel.placement import Placement

__all__ = ["Placement"]
