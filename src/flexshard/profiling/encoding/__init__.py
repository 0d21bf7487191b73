"""Any values to dense ids, and back: mappings made, kept, and applied to data of any kind that DuckDB reads."""
