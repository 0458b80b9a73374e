"""The whole expert layer against transformers' grouped_mm experts."""
