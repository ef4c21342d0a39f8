"""Files that people already have: readers for every kind, and what checks them."""
