"""The operations. One folder each: the public function, its reference, its implementations, its tuning."""
