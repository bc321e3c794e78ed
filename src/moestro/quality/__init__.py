"""What a format or a rewrite costs: how predictions move, on which text, and the report of it."""
