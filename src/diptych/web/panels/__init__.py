"""The panels of the guide: one pure module a chapter, from the parameters of a query to plain data for the page.

Every number and every formula that a page shows is computed here, by the code that serves and simulates. Nothing here
reads a clock, opens a socket or draws; equal parameters give equal answers.
"""
