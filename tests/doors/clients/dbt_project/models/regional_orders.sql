select o.id, o.customer, r.region, o.amount * (1 - r.discount / 100) as amount
from {{ source('service', 'orders') }} o
join {{ ref('regions') }} r on o.customer = r.customer
