"""What is drawn and written from the JSON file of results alone: rows, tables, plots, the page. Measures nothing."""
