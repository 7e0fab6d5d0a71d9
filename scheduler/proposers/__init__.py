"""Who guesses the tokens that a step verifies; one module for each way of guessing."""
