"""Times, memory, the accuracy of results and the reliability of figures. Knows peers and problems, but not reports."""
