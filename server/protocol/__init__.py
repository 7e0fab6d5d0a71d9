"""What clients may send: request models and the rules on their fields."""
