"""twistd's options and the service tree: the only file that names every part."""
