"""What reads a bundle that nobody vouches for: every size, name, depth and type is bounded before it is used."""
