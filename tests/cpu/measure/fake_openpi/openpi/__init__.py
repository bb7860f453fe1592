"""Stands for openpi where it is not installed: its constructors and signatures, none of its computation."""
