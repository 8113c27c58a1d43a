"""The page of every server at `/`: its measurements and routes."""
