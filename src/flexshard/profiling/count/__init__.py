"""Profiles from what is stored: ids counted row by row."""
