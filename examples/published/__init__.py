"""What published Mixture-of-Experts checkpoints hold: configurations, tensor names, shapes and dtypes, as values."""

from published.family import Published
from published.models import PUBLISHED

__all__ = ["PUBLISHED", "Published"]
