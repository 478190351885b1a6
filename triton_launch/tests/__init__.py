"""A package, so that a test module that another one imports is the same module: custom operators
are defined once."""
