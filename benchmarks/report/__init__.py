"""Rows, tables, plots and the page, from only the JSON file of results. Measures nothing."""
