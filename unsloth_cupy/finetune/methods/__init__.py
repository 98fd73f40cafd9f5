"""What a run minimises: one small class for each method."""
