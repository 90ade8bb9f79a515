"""What is specific to the MindSpore platform."""
