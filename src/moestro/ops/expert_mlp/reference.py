"""What the primitive must compute: re-exported from the one specification."""

from moestro.reference import activate, expert_mlp, one_expert

__all__ = ["activate", "expert_mlp", "one_expert"]
