"""The experiments of the article on a tiny model."""
