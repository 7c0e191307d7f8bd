"""The tiles that a mask leaves: in closed form, or as lists."""
