"""The page that every server has at `/`: what is measured for it, and the routes that give it."""
