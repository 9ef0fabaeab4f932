"""What the site takes from outside docs/ when it is built."""
