"""Tests that are specific to the MindSpore platform."""
