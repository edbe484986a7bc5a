"""Step-throughs for learners: small real computations that show every step of a technique."""
