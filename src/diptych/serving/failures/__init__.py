"""What happens when a core or its driver fails by a defect: noted, recorded, shown, and replaced."""
