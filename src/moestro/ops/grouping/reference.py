"""What grouping must compute: re-exported from the one specification."""

from moestro.reference import block_schedule, group_by_expert

__all__ = ["block_schedule", "group_by_expert"]
