-- Items in stock that sell by catalog: a grouping without aggregates.
select i_item_id, i_item_desc, i_current_price
from item
join inventory on inv_item_sk = i_item_sk
join date_dim on d_date_sk = inv_date_sk
join catalog_sales on cs_item_sk = i_item_sk
where i_current_price between 68 and 68 + 30
  and d_date between date '2000-02-01' and date '2000-02-01' + interval 60 days
  and i_manufact_id in (677, 940, 694, 808)
  and inv_quantity_on_hand between 100 and 500
group by i_item_id, i_item_desc, i_current_price
order by i_item_id, i_item_desc, i_current_price
limit 100
