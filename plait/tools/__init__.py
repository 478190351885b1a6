"""Tools for people: what was compiled and why."""
