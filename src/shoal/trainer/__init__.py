"""The loop: the only room that joins the crafts below it."""
