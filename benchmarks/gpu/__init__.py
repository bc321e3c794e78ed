"""The benchmark of a GPU: what it measures, in which order, in processes that may break, and the search for tiles."""
