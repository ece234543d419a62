"""A run is a folder: its files, how they are read, and how they are written whole or not at all. Needs no torch."""
