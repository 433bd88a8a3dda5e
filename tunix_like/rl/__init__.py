"""What objective: advantages, losses, and the learners that put them in one compiled step."""
