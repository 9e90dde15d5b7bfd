"""The pages of the site, as JSON."""

from __future__ import annotations

import json

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from website.background import app
from website.models import Order
from website.tasks import confirm

STOCK = 100


@csrf_exempt  # type: ignore[untyped-decorator]
@require_POST  # type: ignore[untyped-decorator]
@transaction.atomic  # type: ignore[untyped-decorator]
def create_order(request: HttpRequest) -> JsonResponse:
    """Store an order and send its task: either both are committed or neither is."""
    new = json.loads(request.body)
    order = Order.objects.create(article=new["article"], pieces=new["pieces"])
    handle = confirm.with_options(transaction=connection).enqueue(order.pk)
    order.task_id = handle.task_id
    order.save(update_fields=["task_id"])
    if order.pieces > STOCK:
        transaction.set_rollback(True)  # removes the order and its task
        return JsonResponse({"detail": f"Only {STOCK} pieces are in stock."}, status=409)
    return JsonResponse({"id": order.pk, "status": "PENDING", "result": None}, status=201)


@require_GET  # type: ignore[untyped-decorator]
def read_order(request: HttpRequest, order_id: int) -> JsonResponse:
    """Return an order with the state of its task, without waiting for it."""
    order = get_object_or_404(Order, pk=order_id)
    info = app.get_task_info(order.task_id, include_result=True).unwrap()
    if info is None:  # the task has ended, and its row was deleted after the retention time
        return JsonResponse({"id": order_id, "status": "DELETED", "result": None})
    result = info.result.ok if info.result else None
    return JsonResponse({"id": order_id, "status": info.status, "result": result})
