"""The whole batch beside DuckDB and Polars: a sum and a count for each key, whose new values a batch returns."""
