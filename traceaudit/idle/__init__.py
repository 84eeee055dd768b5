"""Why the GPU of a rank was idle, and how its host fed it."""
