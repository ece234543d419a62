"""Kills, full disks, second processes and wrong clocks, at every write of every command: `make chaos`."""
