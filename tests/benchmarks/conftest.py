"""Small layers, and a roof that is not measured."""

from tiny_layers import known_roof, tiny_fixture

__all__ = ["known_roof", "tiny_fixture"]
