"""What top-k must compute: re-exported from the one specification."""

from moestro.reference import topk

__all__ = ["topk"]
