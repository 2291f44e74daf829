"""Commands that :mod:`treespec.cli` registers, one module per group; options that several share are in ``options``."""
