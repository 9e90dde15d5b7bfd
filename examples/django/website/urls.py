"""The addresses of the site."""

from django.urls import path

from website.views import create_order, read_order

urlpatterns = [path("orders", create_order), path("orders/<int:order_id>", read_order)]
